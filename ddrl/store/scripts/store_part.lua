-- fenced
-- Store one part of a checkpoint.
-- KEYS: 1 state (hash), 2 the part (string). ARGV: 1 token, 2 bytes of the part. Answer: 1.
redis.call('SET', KEYS[2], ARGV[2])
return 1
