"""What the processes of one engine share: memory files, child processes, sockets."""
