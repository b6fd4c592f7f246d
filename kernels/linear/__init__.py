"""Dense products: few rows and many, which algorithm multiplies, and the fallbacks."""
