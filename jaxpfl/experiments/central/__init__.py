"""Training without clients: public models and prefinetuning."""
