-- fenced
-- Extend the lease.
-- KEYS: 1 state (hash), 2 lease (string). ARGV: 1 token, 2 time to live in ms. Answer: 1.
redis.call('DEL', KEYS[2])  -- first, so that the script works at maxmemory
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
return 1
