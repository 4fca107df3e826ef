"""What people type beside the stages and the grid."""
