"""A launch where there is no C compiler."""
