"""Messages and stubs between hosts, generated from the `.proto` files beside this one."""
