"""`python -m malmoi` is `malmoi`."""

from malmoi.cli import main

main()
