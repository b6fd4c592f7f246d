"""Dense products: the shape, weights and paths, PyTorch's own; below, a room for each way to multiply.

hopper   sm_90, few rows, in Gluon      library  cuBLASLt, by algorithms that are measured
ordered  one order of sums for a row    formats  weights of 8 and 4 bits, by PyTorch
                                        portable these in Triton
"""
