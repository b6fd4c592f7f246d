"""The fp64 reference of attention, and the rule by which a result is compared with it."""
