-- fenced
-- Point to a checkpoint whose parts are stored, and drop the parts of the previous one.
-- KEYS: 1 state (hash), then parts of the previous checkpoint. ARGV: 1 token, 2 pointer (JSON). Answer: 1.
redis.call('HSET', KEYS[1], 'checkpoint', ARGV[2])
for i = 2, #KEYS do redis.call('UNLINK', KEYS[i]) end
return 1
