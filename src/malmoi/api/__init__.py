"""The public functions of `malmoi`: typed, documented, and free of torch until they are called."""
