"""The tower of a model that sees images: its weights, the order of patches, its computation, results that are kept."""
