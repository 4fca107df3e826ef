"""Detection and segmentation: data, network, metric and stage."""
