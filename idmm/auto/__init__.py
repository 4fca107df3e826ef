"""``idmm train``: its plan, the images, their features, and the runs that it is made of."""
