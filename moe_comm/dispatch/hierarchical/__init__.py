"""The backend for several hosts: a row crosses the network once for each host, and is copied inside it."""
