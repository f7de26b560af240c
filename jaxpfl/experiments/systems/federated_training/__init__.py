"""Federated training: DP-FedAvg, with FreD's choice of a public corpus before it."""
