"""The gates: protocol, reading loop, rewards, advantages, metrics. Pure: no engine, no verl, no I/O."""
