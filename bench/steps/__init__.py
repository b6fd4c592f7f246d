"""`hallmark bench steps`: where the time of a step of the engine goes."""
