"""DP-FedAvg, with FreD's choice of a public corpus and prefinetuning before it."""
