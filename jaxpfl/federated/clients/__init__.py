"""The computations of one client on its own data; imports no other folder of `federated`."""
