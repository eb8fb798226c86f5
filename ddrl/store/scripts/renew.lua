-- fenced
-- Extend the lease, or set it again if it has expired.
-- KEYS: 1 state (hash), 2 lease (string). ARGV: 1 token, 2 time to live in ms. Answer: 1.
-- DEL first: it is allowed at maxmemory, and Redis does not check memory again after a script's first write.
redis.call('DEL', KEYS[2])
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
return 1
