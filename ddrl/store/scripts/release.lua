-- Release the lease if it is the caller's.
-- KEYS: 1 lease (string). ARGV: 1 token. Answer: 1 if it was.
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
