"""The transfer grid of stage 3: its plan, its jobs in order or on Ray, its status."""
