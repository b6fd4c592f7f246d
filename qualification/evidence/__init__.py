"""Evidence as values and as files: rows, the matrix, the difference of two matrices."""
