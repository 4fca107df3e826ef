"""``idmm train``: its plan, the images, pseudo-labels, and the runs that it is made of."""
