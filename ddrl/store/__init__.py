"""All that is kept on the server, one noun a file; beside `ddrl.store.server` the only importer of redis."""
