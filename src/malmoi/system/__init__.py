"""What lies below everything: files, run folders, this machine, limits on untrusted input."""
