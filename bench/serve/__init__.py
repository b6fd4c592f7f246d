"""`hallmark bench serve`: servers beside each other under one load."""
