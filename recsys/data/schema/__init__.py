"""The columns of event files and the vocabularies that turn original ids into rows of tables."""
