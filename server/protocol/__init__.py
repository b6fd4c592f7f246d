"""The typed messages between the API process and the engine process, and how they cross the socket."""
