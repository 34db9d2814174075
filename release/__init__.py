"""The tools that make a release: locks of dependencies, artifacts, signatures."""
