"""The commands on finished runs: predict, embed, similar, explore, report, export."""
