-- Assign an open evaluation to a player, or count another beat of the player that has it.
-- KEYS: 1 evaluating (hash). ARGV: 1 id, 2 player. Answer: the evaluation (JSON); nil if it is closed or another's.
local evaluation = redis.call('HGET', KEYS[1], ARGV[1])
if not evaluation then return false end
local player = redis.call('HGET', KEYS[1], ARGV[1] .. ':player')
if player and player ~= ARGV[2] then return false end
redis.call('HDEL', KEYS[1], ARGV[1] .. ':error')  -- first: works at maxmemory
redis.call('HSET', KEYS[1], ARGV[1] .. ':player', ARGV[2])
increase(KEYS[1], ARGV[1] .. ':beats', 1)
return evaluation
