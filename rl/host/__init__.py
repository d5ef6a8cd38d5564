"""Access to this host: devices, durable files, sockets, threads and signals."""
