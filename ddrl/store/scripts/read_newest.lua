-- Read the newest entries of a stream that workers may write, and no more of them than fits; see also `shrink`.
-- KEYS: 1 stream. ARGV: 1 id before them, 2 largest id, 3 to 5 bounds as of `newest`.
-- Answer: id of the newest, or of the last that the stream gave if that is smaller than ARGV[1], so that a reader who
--         followed a later one sees what comes after lower_ids.lua; "" if there is nothing new; entries, the newest first.

-- The last id that the stream gave; 0-0 if there is no stream. It looks at the first and the last entry.
local function last_id()
  local info = redis.call('EXISTS', KEYS[1]) == 1 and redis.call('XINFO', 'STREAM', KEYS[1]) or {}
  for at = 1, #info, 2 do
    if info[at] == 'last-generated-id' then return info[at + 1] end
  end
  return '0-0'
end

shrink(KEYS[1])
local most_parts, most_bytes, longest = bound(ARGV[3], 300000), bound(ARGV[4], 2 ^ 25), bound(ARGV[5], 2 ^ 19)
local found, last = newest(KEYS[1], '(' .. ARGV[1], ARGV[2], most_parts, most_bytes, longest)
local after_ms, after_number = string.match(ARGV[1], '(%d+)-(%d+)')
local time = redis.call('TIME')
if last == '' and tonumber(after_ms) >= time[1] * 1000 + math.floor(time[2] / 1000) then  -- else new ids are larger
  local given = last_id()
  local ms, number = string.match(given, '(%d+)-(%d+)')
  local by = tonumber(ms) - tonumber(after_ms)
  if by < 0 or by == 0 and tonumber(number) < tonumber(after_number) then last = given end
end
return {last, found}
