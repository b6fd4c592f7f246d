"""What is proven, how it is proven, and what to choose. Imports kernels; the server imports its pure half."""
