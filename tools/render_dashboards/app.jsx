// One dashboard, drawn from a live Prometheus with Grafana's own components: field options, units, thresholds,
// transformations, panel frames, time series, stats and tables are Grafana's code. State timelines are drawn here, since
// Grafana publishes that panel in its server only.
//
// ?dashboard=FILE&prometheus=URL&theme=dark|light&from=SECONDS&to=SECONDS&rate=20s&at=SECONDS (of instant queries)
import {
  FieldType, ThemeContext, applyFieldOverrides, createFieldConfigRegistry, createTheme, dateTime, getDisplayProcessor,
  getFieldDisplayName, getFieldDisplayValues, standardEditorsRegistry, standardFieldConfigEditorRegistry,
  standardTransformersRegistry, transformDataFrame,
} from '@grafana/data';
import { initPluginTranslations } from '@grafana/i18n';
import * as ui from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import React from 'react';
import { createRoot } from 'react-dom/client';
import { lastValueFrom } from 'rxjs';
import * as dataAll from '@grafana/data';

const { BigValue, GlobalStyles, PanelChrome, TimeSeries } = ui;
const asked = new URLSearchParams(location.search);
const from = Number(asked.get('from')), to = Number(asked.get('to')), at = Number(asked.get('at') || to);
const CELL = 30, GAP = 8, COLUMNS = 24;
const theme = createTheme({ colors: { mode: asked.get('theme') || 'dark' } });
const timeRange = { from: dateTime(from * 1000), to: dateTime(to * 1000), raw: { from: 'now-1h', to: 'now' } };
const filled = (text) => text
  .replaceAll('$__rate_interval', asked.get('rate') || '20s')
  .replace(/\$(job|model_name|instance|engine|pod|target)\b/g, (_, name) => asked.get(`var-${name}`) ?? '.*');

async function ask(path, parameters) {
  const answer = await fetch(`${asked.get('prometheus')}/api/v1/${path}`, { method: 'POST', body: new URLSearchParams(parameters) });
  const body = await answer.json();
  if (body.status !== 'success') throw new Error(body.error);
  return body.data.result;
}

const legend = (format, labels) => format.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, name) => labels[name] ?? '').trim();

async function framesOf(panel) {
  const all = [];
  for (const target of panel.targets) {
    const expr = filled(target.expr);
    if (target.format === 'table') {
      all.push(tableFrame(await ask('query', { query: expr, time: at }), target.refId, panel.targets.length));
    } else if (target.instant) {
      for (const one of await ask('query', { query: expr, time: at })) all.push(seriesFrame([one.value], one.metric, target));
    } else {
      const step = Math.max(1, Math.round((to - from) / 400));
      for (const one of await ask('query_range', { query: expr, start: from, end: to, step })) {
        all.push(seriesFrame(spaced(one.values, step), one.metric, target));
      }
    }
  }
  return all;
}

// A gap in the samples is a gap in the line.
function spaced(values, step) {
  const out = [];
  for (const [time, value] of values) {
    if (out.length && time - out[out.length - 1][0] > 1.5 * step) out.push([out[out.length - 1][0] + step, null]);
    out.push([time, value]);
  }
  return out;
}

const number = (text) => (text === null ? null : text === '+Inf' ? Infinity : Number(text));

function seriesFrame(values, labels, target) {
  return {
    refId: target.refId, length: values.length,
    fields: [
      { name: 'Time', type: FieldType.time, config: {}, values: values.map(([time]) => time * 1000) },
      { name: 'Value', type: FieldType.number, labels, values: values.map(([, value]) => number(value)),
        config: { displayNameFromDS: target.legendFormat ? legend(target.legendFormat, labels) : undefined } },
    ],
  };
}

function tableFrame(series, refId, count) {
  const names = [...new Set(series.flatMap((one) => Object.keys(one.metric)))].sort();
  return {
    refId, length: series.length,
    fields: [
      { name: 'Time', type: FieldType.time, config: {}, values: series.map((one) => one.value[0] * 1000) },
      ...names.map((name) => ({ name, type: FieldType.string, config: {}, values: series.map((one) => one.metric[name] ?? '') })),
      { name: count === 1 ? 'Value' : `Value #${refId}`, type: FieldType.number, config: {}, values: series.map((one) => number(one.value[1])) },
    ],
  };
}

async function prepared(panel) {
  // The published TimeSeries gives lines and legend different colours by name; Grafana's own panel does not.
  const color = panel.fieldConfig.defaults.color;
  if (color?.mode === 'palette-classic-by-name') color.mode = 'palette-classic';
  let data = await framesOf(panel);
  if (panel.transformations?.length) data = await lastValueFrom(transformDataFrame(panel.transformations, data));
  const registry = createFieldConfigRegistry({ useCustomConfig: addCustom }, 'panel');
  const shown = applyFieldOverrides({
    data: named(data), fieldConfig: panel.fieldConfig, fieldConfigRegistry: registry, theme, timeZone: 'utc',
    replaceVariables: (text) => text,
  });
  return named(shown);
}

// Panels look names up in `state`, where Grafana's query runner puts them; colours by name follow from them.
function named(frames) {
  for (const frame of frames) for (const field of frame.fields) {
    field.state = { ...field.state, displayName: null };
    field.state.displayName = getFieldDisplayName(field, frame, frames);
  }
  return frames;
}

const CUSTOM = ['drawStyle', 'lineWidth', 'fillOpacity', 'showPoints', 'thresholdsStyle', 'cellOptions', 'minWidth', 'width', 'axisSoftMax', 'axisWidth', 'spanNulls', 'axisPlacement', 'stacking', 'lineInterpolation', 'gradientMode'];
function addCustom(builder) {
  for (const path of CUSTOM) {
    builder.addCustomEditor({ id: path, path, name: path, editor: () => null, override: () => null, process: (value) => value, shouldApply: () => true });
  }
}

function Graph({ panel, data, width, height }) {
  if (!data.length) return <Nothing text="No data" />;
  for (const frame of data) for (const field of frame.fields) {
    field.config.custom = { drawStyle: 'line', lineWidth: 1, fillOpacity: 0, showPoints: 'never', spanNulls: false, lineInterpolation: 'linear', ...field.config.custom };
  }
  return (
    <TimeSeries frames={data} timeRange={timeRange} timeZone="utc" width={width} height={height} legend={panel.options.legend} options={panel.options}>
      {() => null}
    </TimeSeries>
  );
}

function Figure({ panel, data, width, height }) {
  const values = getFieldDisplayValues({
    data, fieldConfig: panel.fieldConfig, reduceOptions: panel.options.reduceOptions, replaceVariables: (text) => text, theme, timeZone: 'utc',
  });
  const shown = values.length ? values[0].display : getDisplayProcessor({ field: { type: FieldType.number, config: panel.fieldConfig.defaults }, theme })(null);
  return (
    <BigValue value={{ ...shown, title: undefined }} width={width} height={height} theme={theme} textMode={panel.options.textMode}
      colorMode={data.length ? panel.options.colorMode : 'none'} graphMode="none" justifyMode="auto" />
  );
}

function Rows({ panel, data, width, height }) {
  const frame = data[0];
  if (!frame?.length) return <Nothing text={panel.fieldConfig.defaults.noValue} />;
  return (
    <TableNG data={frame} width={width} height={height} cellHeight={panel.options.cellHeight} sortBy={panel.options.sortBy}
      timeRange={timeRange} fieldConfig={panel.fieldConfig} structureRev={1} />
  );
}

function Bands({ panel, data, width, height }) {
  if (!data.length) return <Nothing text={panel.fieldConfig.defaults.noValue} />;
  const left = Math.min(260, width * 0.4), row = Math.min(34, (height - 22) / data.length), scale = (width - left - 8) / (to - from);
  return (
    <svg width={width} height={height} style={{ font: `12px ${theme.typography.fontFamily}` }}>
      {data.map((frame, place) => {
        const [times, field] = frame.fields, step = (times.values[1] - times.values[0]) / 1000 || 1;
        return (
          <g key={place}>
            <text x={left - 8} y={place * row + row / 2 + 4} textAnchor="end" fill={theme.colors.text.primary}>
              {getFieldDisplayName(field, frame, data).slice(0, Math.floor(left / 6.2))}
            </text>
            {times.values.map((time, index) => field.values[index] !== null && (
              <rect key={index} x={left + (time / 1000 - from) * scale} y={place * row + row * 0.1} width={step * scale + 0.5}
                height={row * 0.8} fill={field.display(field.values[index]).color} />
            ))}
          </g>
        );
      })}
      {[0, 0.25, 0.5, 0.75].map((part) => (
        <text key={part} x={left + part * (width - left)} y={height - 6} fill={theme.colors.text.secondary}>
          {new Date((from + part * (to - from)) * 1000).toISOString().slice(11, 19)}
        </text>
      ))}
    </svg>
  );
}

const Nothing = ({ text }) => (
  <div style={{ display: 'flex', height: '100%', alignItems: 'center', justifyContent: 'center', color: theme.colors.text.secondary, textAlign: 'center' }}>{text}</div>
);

const KINDS = { timeseries: Graph, stat: Figure, table: Rows, 'state-timeline': Bands };

function Panel({ panel, unit }) {
  const { x, y, w, h } = panel.gridPos;
  const place = { position: 'absolute', left: GAP / 2 + x * unit + GAP / 2, top: y * (CELL + GAP), width: w * unit - GAP, height: h * (CELL + GAP) - GAP };
  if (panel.type === 'row') {
    return <div style={{ ...place, font: `500 16px/30px ${theme.typography.fontFamily}`, color: theme.colors.text.primary }}>{panel.title}</div>;
  }
  const Kind = KINDS[panel.type];
  return (
    <div style={place}>
      <PanelChrome title={panel.title} width={place.width} height={place.height} padding={panel.type === 'stat' ? 'none' : 'md'}>
        {(width, height) => (panel.failed ? <Nothing text={panel.failed} /> : <Kind panel={panel} data={panel.data} width={width} height={height} />)}
      </PanelChrome>
    </div>
  );
}

async function main() {
  await initPluginTranslations('kvwatch', []);
  dataAll.setTimeZoneResolver?.(() => 'utc');
  standardEditorsRegistry.setInit(() => []);
  standardFieldConfigEditorRegistry.setInit(standardConfigs);
  const known = new Map(Object.values(dataAll.standardTransformers).map((one) => [one.id, one])); // one stands there twice
  standardTransformersRegistry.setInit(() => [...known.values()].map((transformation) => ({ id: transformation.id, name: transformation.name, transformation: async () => transformation })));
  const dashboard = await (await fetch(asked.get('dashboard'))).json();
  for (const panel of dashboard.panels.filter((one) => one.type !== 'row')) {
    try {
      panel.data = await prepared(panel);
    } catch (error) {
      panel.failed = String(error);
      console.error(panel.title, error);
    }
  }
  const unit = (innerWidth - GAP) / COLUMNS;
  const bottom = Math.max(...dashboard.panels.map((panel) => panel.gridPos.y + panel.gridPos.h)) * (CELL + GAP);
  Object.assign(document.body.style, { background: theme.colors.background.canvas, margin: 0 });
  createRoot(document.getElementById('root')).render(
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <div style={{ position: 'relative', height: bottom, marginTop: GAP }}>
        {dashboard.panels.map((panel) => <Panel key={panel.id} panel={panel} unit={unit} />)}
      </div>
    </ThemeContext.Provider>,
  );
  document.title = `drawn ${bottom + GAP}`;
}

// Standard options of a field, as Grafana registers them: how a value of fieldConfig becomes part of a field.
function standardConfigs() {
  return ['unit', 'min', 'max', 'decimals', 'displayName', 'noValue', 'thresholds', 'mappings', 'color', 'links', 'description', 'filterable'].map((id) => ({
    id, path: id, name: id, editor: () => null, override: () => null, process: (value) => value, shouldApply: () => true,
  }));
}

main();
