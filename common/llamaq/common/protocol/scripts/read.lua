-- Reads new entries of job streams and gives each entry a lease, so that no entry is left without a lease if the worker
-- dies. The streams of a paused queue are not read. While tenants wait, entries are read in their turns (`_turns.lua`).
-- With a worker, the jobs of these entries are claimed at once, as in claim.lua: their preparation begins.
--
-- If the reply is lost, the worker calls again with the same numbers, and gets the same reply. For this, the entries that a
-- call has read are recorded. Otherwise these jobs would stand still until their leases expire, and another worker that takes
-- them would count the death of this worker, which does not know them.
--
-- The hashes of the jobs are not in KEYS: the entries name the jobs. All keys have the hash tag of the stream.
--
-- KEYS[..]  streams   job streams
-- ARGV[1]   group     consumer group of the job streams
-- ARGV[2]   count     number of entries to read from each stream at most
-- ARGV[3]   lease_ms  how long the worker keeps an entry without a renewal, in ms
-- ARGV[4]   total     number of entries to read from all streams together at most
-- ARGV[5]   worker    id of the worker; '': no job is claimed
-- ARGV[6]   model     fingerprint of the worker's model; '': not known
-- ARGV[7]   restart   '1': the worker starts a job of another model again, if possible; '0': it leaves the job
-- ARGV[8]   reader    random text of this process of the worker; '': nothing is recorded
-- ARGV[9..] numbers   for each stream: how many replies of `reader` with entries of the stream the worker has received
--
-- Returns an array with {stream, entries} for each stream that has new entries. `entries` is an array with
-- {id, {name, value, ...}, reply} for each entry. `reply` is that of claim.lua to the claim of the job. It is absent if the
-- job was not claimed: there is no worker, the entry names no job of this partition, or the requests of the jobs
-- before it are large.

local group, max_count, lease_ms, left = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local by = { -- see _claim.lua
  group = group, worker = ARGV[5], lease_ms = ARGV[3], at_risk = true, model = ARGV[6], restarts = ARGV[7] == '1',
  now = now_ms(), paused = false, n_attempts = 0, n_bytes = 0,
}
local reader = ARGV[8] or ''
local N_ARGUMENTS = 8 -- before the numbers
local claims = {} -- the replies to all claims
local count -- number of entries to read from the next stream at most
local MAX_READ = 1000 -- entries that one command gives leases: Lua passes a few thousand words at most
local RECORD_MS = 600000 -- also longer than a lease: then another worker may have counted the death of this worker
local MAX_PASSED = 1000 -- entries of tenants that one call passes in the order of a stream, about

-- Returns up to `count` entries of a stream in which no entry belongs to a tenant.
local function read_all(stream)
  local reply = redis.call('XREADGROUP', 'GROUP', group, WAITING, 'COUNT', count, 'STREAMS', stream, '>')
  local entries, words = reply and reply[1][2] or {}, {'XCLAIM', stream, group, WAITING, 0}
  if #entries > 0 then
    for _, entry in ipairs(entries) do
      words[#words + 1] = entry[1] -- its id
    end
    words[#words + 1], words[#words + 2], words[#words + 3] = 'IDLE', EXPIRED_IDLE_MS - lease_ms, 'JUSTID'
    redis.call(unpack(words))
  end
  return entries
end

-- Returns whether an entry is or was claimed in a turn of its tenant. If an entry of a tenant neither waits nor is
-- pending, it was lost or another client has written it. Then it is read like an entry without a tenant.
local function belongs_to_turn(stream, id, fields)
  local tenant = tenant_in(fields)
  if not tenant then
    return false
  end
  local _, line = turn_keys(stream, tenant)
  return redis.call('ZSCORE', line, id) or is_pending(stream, group, id)
end

local function lease(stream, id)
  redis.call('XCLAIM', stream, group, WAITING, 0, id, 'IDLE', EXPIRED_IDLE_MS - lease_ms, 'FORCE', 'JUSTID')
end

-- Appends to `found` up to `n` entries in the order of the stream, without entries of tenants. Entries are read with
-- NOACK, because entries that were claimed in a turn are pending already. The lease makes an entry pending.
local function read_in_order(stream, n, found)
  local n_read, last = 0, #found + n
  repeat
    local wanted = last - #found
    local reply = redis.call('XREADGROUP', 'GROUP', group, WAITING, 'COUNT', wanted, 'NOACK', 'STREAMS', stream, '>')
    local entries = reply and reply[1][2] or {}
    for _, entry in ipairs(entries) do
      local id, fields = unpack(entry)
      if not belongs_to_turn(stream, id, fields) then
        lease(stream, id)
        found[#found + 1] = entry
      end
    end
    n_read = n_read + #entries
  until #found == last or #entries < wanted or n_read >= MAX_PASSED
end

-- Appends to `found` up to `count` entries in the turns of the tenants.
local function read_in_turns(stream, turns, shares, found)
  -- Reads the oldest entry of a tenant. Returns nil if it was deleted.
  local function read_turn(tenant)
    local id = redis.call('ZPOPMIN', turns .. ':' .. tenant)[1]
    redis.call('HINCRBY', shares, '*waiting', -1)
    local entry = redis.call('XRANGE', stream, id, id)[1]
    if entry then
      lease(stream, id)
    end
    return entry
  end

  -- Reads the oldest entry of a job without a tenant that was added while no tenant waited. From now on the job counts
  -- like the jobs of a tenant. Returns nil if there is no such entry.
  local function read_older()
    local older = {}
    read_in_order(stream, 1, older)
    local entry = older[1]
    if entry then
      local _, fields = unpack(entry)
      local _, job_id = unpack(fields)
      local job = job_key(stream, tostring(job_id))
      if redis.pcall('HEXISTS', job, 'status') == 1 then
        redis.call('HSET', job, 'tenant', '')
      end
    end
    return entry
  end

  redis.call('PERSIST', stream) -- lets the later writes pass although Redis is full
  local n_pending = unpack(redis.call('XPENDING', stream, group))
  local n_older = redis.call('XLEN', stream) - n_pending - (redis.call('HGET', shares, '*waiting') or 0)
  if n_older > 0 and not redis.call('ZSCORE', turns, '') then
    set_turn(turns, shares, '')
  end
  while #found < count do
    local tenant = redis.call('ZRANGE', turns, 0, 0)[1]
    local n_left = tenant and redis.call('ZCARD', turns .. ':' .. tenant)
    if not tenant or (tenant == '' and n_left == 0 and redis.call('ZCARD', turns) == 1) then -- no tenant waits any more
      redis.call('ZREM', turns, '')
      read_in_order(stream, count - #found, found)
      break
    end
    local entry
    if tenant == '' and n_older > 0 then
      entry = read_older()
      n_older = entry and n_older - 1 or 0
    elseif n_left > 0 then
      entry, n_left = read_turn(tenant), n_left - 1
    end
    if entry then
      found[#found + 1] = entry
      count_claimed(turns, shares, tenant, 1)
    end
    if n_left > 0 or (tenant == '' and n_older > 0) then
      set_turn(turns, shares, tenant)
    else
      redis.call('ZREM', turns, tenant)
    end
  end
  drop_counters(turns, shares)
end

-- Returns up to `count` entries of a stream.
local function read_stream(stream)
  local found, turns, _, shares = {}, turn_keys(stream)
  if redis.call('EXISTS', turns, shares) == 0 then
    return read_all(stream)
  elseif redis.call('EXISTS', turns) == 1 then
    read_in_turns(stream, turns, shares, found)
  else
    read_in_order(stream, count, found)
  end
  return found
end

-- Returns the key of the record of the last read of a stream by this worker: {reader, number, entry, attempt, ...}. The
-- attempt is 0 if the job of the entry was not claimed.
local function record_key(stream)
  local partition, priority = parts_of(stream)
  return partition .. 'read:' .. priority .. ':' .. by.worker
end

local function record_read(stream, number, entries)
  local record = {reader, number}
  for _, entry in ipairs(entries) do
    local id, _, reply = unpack(entry)
    local code, attempt = unpack(reply or {})
    record[#record + 1], record[#record + 2] = id, code == 'run' and attempt or 0
  end
  redis.pcall('SET', record_key(stream), cmsgpack.pack(record), 'PX', RECORD_MS) -- refused: Redis is full, nothing changed
end

-- Returns the entries of a call with this number whose reply was lost, and sets `by.claimed`. Returns nil if there is no
-- such entry. A call that Redis executes late, after the worker has called again and received the reply, reads nothing.
local function read_again(stream, number)
  local is_record, record = pcall(cmsgpack.unpack, redis.pcall('GET', record_key(stream)))
  if not is_record or type(record) ~= 'table' then
    return nil
  end
  local own_reader, own_number = record[1], record[2]
  if own_reader ~= reader or own_number < number then
    return nil
  elseif own_number > number then
    return {}
  end
  local found = {}
  by.claimed = {}
  for place = 3, #record, 2 do
    local id, attempt = record[place], record[place + 1]
    by.claimed[id] = attempt
    found[#found + 1] = redis.call('XRANGE', stream, id, id)[1]
  end
  return #found > 0 and found or nil
end

-- Claims the jobs of entries that were just read, and appends the reply for each to its entry.
local function claim_read(stream, entries)
  local partition, queue, number = string.match(stream, '^(.*:{([%w_-]+):(%d+)}:)jobs:')
  local first = queue .. '.' .. number .. '.'
  by.n_attempts = 0
  for _, entry in ipairs(entries) do
    local entry_id, fields = unpack(entry)
    local id = job_id_in(fields) or ''
    if by.n_bytes < MAX_CLAIMED_BYTES and #id == #first + 32 and string.sub(id, 1, #first) == first
      and string.find(id, '^[0-9a-f]+$', #first + 1) then
      local reply = for_one_job(claim_job, by, partition .. 'job:' .. id, partition .. 'events:' .. id, stream, entry_id,
        partition .. 'tokens:' .. id, '')
      entry[3] = reply
      claims[#claims + 1] = reply
    end
  end
  if by.n_attempts > 0 then
    count_events(stream, 'attempts', by.n_attempts)
  end
end

local replies = {}
for place, stream in ipairs(KEYS) do
  local number = tonumber(ARGV[N_ARGUMENTS + place])
  count = math.min(max_count, left, MAX_READ)
  if count > 0 and not is_paused(stream) then
    by.claimed = nil
    local again = reader ~= '' and read_again(stream, number)
    by.has_leased = not again
    local is_read, found = true, again
    if not again then
      is_read, found = pcall(read_stream, stream)
    end
    if not is_read and #replies == 0 then
      return type(found) == 'table' and found or {err = tostring(found)}
    elseif not is_read then
      break -- the next call returns the error: the caller must get the entries that have leases now
    elseif #found > 0 then
      if by.worker ~= '' then
        claim_read(stream, found)
      end
      if reader ~= '' then
        record_read(stream, number, found)
      end
      replies[#replies + 1] = {stream, found}
      left = left - #found
    end
  end
end
local outcome = reply_for_jobs(claims)
return outcome.err and outcome or replies
