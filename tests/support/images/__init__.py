"""Files of image processors, and images of all kinds."""
