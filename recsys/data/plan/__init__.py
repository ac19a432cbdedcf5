"""The order of an epoch: which rows make up which batch, on which rank."""
