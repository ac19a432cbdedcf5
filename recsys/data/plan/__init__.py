"""Plans an epoch: decides which rows make up which batch, and which rank reads it."""
