-- Give names of keys as SCAN does; keys with longer names than ddrl's, which workers may write, are deleted.
-- KEYS: none. ARGV: 1 cursor, 2 pattern, 3 about how many keys to look at. Answer: next cursor ("0" at the end), names.
local page, names = redis.call('SCAN', ARGV[1], 'MATCH', ARGV[2], 'COUNT', bound(ARGV[3], 10000)), {}
for _, name in ipairs(page[2]) do
  if #name <= 1024 then
    names[#names + 1] = name
  else
    redis.pcall('UNLINK', name)
  end
end
return {page[1], names}
