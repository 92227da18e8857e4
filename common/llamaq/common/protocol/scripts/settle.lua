-- Settles what the last worker of a job left behind, when another one has taken the job over and before it begins it.
--
-- The last worker died of it, perhaps, when the job is still 'running' (who hands a job back leaves it 'queued'), when
-- that worker is not the one that took it over, when its heartbeat is old, and when no token was stored since its
-- attempt began. Then it is blamed: `crashes` and `deaths` name one more. Blamed once too often, it ends here.
-- In any case the job is 'queued' afterwards, so that nobody writes to it before it is begun again; settled twice, a
-- death counts once.
--
-- A worker that was only stopped or cut off is as silent as a dead one, and is blamed for. When it comes back, its first
-- call for this attempt is answered 'lost', and takes the blame back (`forgive`).
--
-- KEYS[1] job      hash                           KEYS[2] events   stream of its events
-- KEYS[3] stream   job stream it was claimed from KEYS[4] dead     stream of dead letters
-- ARGV[1] entry id  ARGV[2] consumer group        ARGV[3] channel of its events      ARGV[4] job id
-- ARGV[5] worker that took it over                ARGV[6] worker that had it, '' for none
-- ARGV[7] time of the latter's last heartbeat, ms, 0 for none                ARGV[8] how old that is of a dead one, ms
-- ARGV[9] with so many deaths it runs apart, with one more it ends
-- ARGV[10] life of its keys when it ends, ms, unless `ttl_ms` is more        ARGV[11] entries kept in the dead stream
--
-- Returns 'ok' it may be begun | 'suspect' it may be begun where nothing else runs | 'dead' it has ended here
--       | 'stale' another worker has begun it meanwhile

local job, events, stream, dead = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local entry, group, channel, id, taker, had = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local apart_from = tonumber(ARGV[9])

local state = redis.call('HMGET', job,
  'status', 'worker', 'entry', 'priority', 'cancel', 'attempt', 'generated', 'generated_at_start', 'ttl_ms')
if not state[1] or has_ended(state[1]) or not is_its_entry(state[3], state[4], stream, entry) or state[5] then
  return 'ok' -- to begin it is to find out
end

local deaths, is_unproven = deaths_of(job), state[7] and state[7] == state[8]
if state[1] == 'running' then
  if state[2] ~= had then
    return 'stale'
  end
  if is_unproven and had ~= taker and now_ms() - tonumber(ARGV[7]) >= tonumber(ARGV[8]) then
    deaths = add_death(job, state[6], had)
  end
  redis.call('HSET', job, 'status', 'queued')
end
if not is_unproven or #deaths < apart_from then
  return 'ok'
end
if #deaths == apart_from then
  return 'suspect'
end

local workers = {}
for place, death in ipairs(deaths) do
  workers[place] = string.match(death, '=(.*)')
end
workers = table.concat(workers, ' ')
local reason = #deaths .. ' workers died with this job, none of which stored a token of it: ' .. workers
local failed = cmsgpack.pack({type = 'failed', code = 'poison', message = reason})
redis.call('XADD', dead, 'MAXLEN', '~', ARGV[11], '*', 'job', id, 'reason', reason, 'workers', workers)
terminate(job, events, channel, stream, group, entry, 'failed', failed, {'error', failed})
local life = math.max(tonumber(state[9]), tonumber(ARGV[10]))
redis.call('PEXPIRE', job, life)
redis.call('PEXPIRE', events, life)
return 'dead'
