-- Assign an open evaluation to a player, or count another beat of the player that has it.
-- KEYS: 1 evaluating (hash), 2 players (hash). ARGV: 1 id, 2 player.
-- Answer: the evaluation (JSON); nil if it is not open, has a result, or is another's.
local id = ARGV[1]
local evaluation = redis.call('HGET', KEYS[1], id)
if not evaluation or redis.call('HEXISTS', KEYS[2], id .. ':done') == 1 then return false end
local player = redis.call('HGET', KEYS[2], id .. ':player')
if player and player ~= ARGV[2] then return false end
redis.call('HDEL', KEYS[2], id .. ':error')  -- first: works at maxmemory
redis.call('HSET', KEYS[2], id .. ':player', ARGV[2])
increase(KEYS[2], id .. ':beats', 1)
return evaluation
