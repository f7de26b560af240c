"""What one client computes from its own data; imports no other folder of `federated`."""
