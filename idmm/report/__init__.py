"""Tables, pictures and pages, drawn from finished files alone: no torch, no engine, no methods, no grid's scheduler."""
