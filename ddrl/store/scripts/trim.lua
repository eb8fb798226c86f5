-- fenced
-- KEYS: state, experience. ARGV: token, first entry that stays.
-- What was appended before the first entry that stays is what was trimmed; an entry that says what cannot be was not
-- written by the append, and the next one is asked.
local removed = redis.call('XTRIM', KEYS[2], 'MINID', ARGV[2])
local appended = tonumber(redis.call('HGET', KEYS[1], 'appended_bytes') or 0)
local trimmed = appended
local from = '-'
for _ = 1, 8 do  -- one by one, for entries are large
  local entry = redis.call('XRANGE', KEYS[2], from, '+', 'COUNT', 1)[1]
  if not entry then break end
  from = '(' .. entry[1]
  local bytes, size
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 'b' then bytes = tonumber(entry[2][i + 1]) end
    if entry[2][i] == 's' then size = tonumber(entry[2][i + 1]) end
  end
  if bytes and size and size > 0 and bytes <= appended and bytes >= size then
    trimmed = bytes - size
    break
  end
end
redis.call('HSET', KEYS[1], 'trimmed_bytes', string.format('%.0f', trimmed))
return removed
