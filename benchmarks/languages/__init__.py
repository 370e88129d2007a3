"""How fast the client libraries are, language by language (`turns`)."""
