-- Assign an open evaluation to a player, or count another beat of the player that has it.
-- KEYS: 1 evaluating (hash). ARGV: 1 id, 2 player, 3 seconds after which the hash expires at the latest (0: never).
-- Answer: the evaluation (JSON); nil if it is closed, another's, or in a hash that no command keeps alive.
local left = ARGV[3] ~= '0' and redis.call('TTL', KEYS[1])
if left and (left < 0 or left > tonumber(ARGV[3])) then return false end
if redis.call('HSTRLEN', KEYS[1], ARGV[1]) > 16384 then return false end
local evaluation = redis.call('HGET', KEYS[1], ARGV[1])
if not evaluation then return false end
local player = redis.call('HGET', KEYS[1], ARGV[1] .. ':player')
if player and player ~= ARGV[2] then return false end
redis.call('HDEL', KEYS[1], ARGV[1] .. ':error')  -- first: works at maxmemory
redis.call('HSET', KEYS[1], ARGV[1] .. ':player', ARGV[2])
increase(KEYS[1], ARGV[1] .. ':beats', 1)
return evaluation
