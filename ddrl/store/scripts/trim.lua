-- fenced
-- Drop the entries before the first one to keep. `trimmed_bytes` becomes the bytes appended before that entry.
-- KEYS: 1 state (hash), 2 experience (stream), 3 counts (hash). ARGV: 1 token, 2 the first entry to keep. Answer: entries dropped.
local removed = redis.call('XTRIM', KEYS[2], 'MINID', ARGV[2])
local appended = number(redis.call('HGET', KEYS[3], 'appended_bytes')) or 0
local before = tonumber(redis.call('HGET', KEYS[1], 'trimmed_bytes') or 0)
local first, trimmed = first_entry('XRANGE', KEYS[2], '-', '+'), appended
if first then
  local counts = {}
  for i = 1, #first[2], 2 do counts[first[2][i]] = number(first[2][i + 1]) end
  trimmed = (counts.b or 0) - (counts.s or 0)
  -- If no append wrote this entry, its counts are wrong: a later trim sets the figure. Workers write both counts, but
  -- the stream never held much more than its budget.
  local most = before + (tonumber(redis.call('HGET', KEYS[1], 'max_bytes')) or 0) + 2 ^ 30
  if trimmed < before or trimmed > math.min(appended, most) then trimmed = before end
end
redis.call('HSET', KEYS[1], 'trimmed_bytes', string.format('%.0f', trimmed))
return removed
