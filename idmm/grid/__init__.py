"""The transfer grid: its plan, its jobs in order or on Ray, its status."""
