"""The Headrace server: the gRPC front end of the engine."""
