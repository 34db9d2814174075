"""What the processes of one host share: memory files, child processes, socket names."""
