"""What all services share at their edges. Written by hand; generated messages are `tandem_pb`."""
